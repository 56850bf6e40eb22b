"""What clients and the command line ask, over the two sockets."""
