"""Rehearsal: samples of earlier data that are mixed into each batch. Pure.

`content` decides what a memory keeps, `growth` what within an epoch, `passes` which of it each step
replays.
"""
