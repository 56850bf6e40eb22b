"""A user's package, whose globals and class attributes datasets read."""

OFFSET = 0


class Settings:
    factor = 1
