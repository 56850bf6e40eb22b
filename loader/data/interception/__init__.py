"""Functions by which Python and libraries in C open files, replaced while a person's code runs."""
