"""How daemons of different nodes serve each other: what travels, who sends, who reads."""
