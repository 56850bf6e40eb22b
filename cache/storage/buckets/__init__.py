"""How obstore reaches a bucket, and by whose rights: its arguments for each of the three clouds."""
