"""The subcommands of `creel`: options and arguments; the work is done beside."""
