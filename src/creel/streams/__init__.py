"""Streams: records that a simulation or an instrument hands to training while it runs.

A stream is a folder, its *log* (`log`): chunks of records, numbered in the order of their arrival.
A `Producer` appends to it, and `arrivals` tells a reader what has arrived. Readers write down how
far they are (`cursors`), so that producers wait for them and delete what they have read.

Nothing here needs torch or a daemon. The reader's dataset is in `creel.loader.extras.streams`.
"""
