"""What leaves memory when room is needed. Pure.

The core asks for room in `daemon/core/admission.py`; what leaves is the answer of `victims` of the
dataset's policy, an `EvictionPolicy` (`policy`), which `policy_for` picks by what the plans say:

- `planned`: whole epochs. What the epoch still has to read stays; what else stays over its end is
  planned once per epoch by `retention`; `sampling` gives each priority its sampling rate.
- `farthest`: streams with repeats. What is read last of all leaves first.
- `recent`: nothing is known of what comes. What was read last leaves first.

`policies/cluster/eviction.py` and `homes.py` are the policies of nodes that serve each other.
"""
