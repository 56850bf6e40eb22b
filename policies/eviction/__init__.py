"""Which objects leave memory when room is needed. Pure.

The core asks for room in `daemon/core/admission.py`. The dataset's `EvictionPolicy` (`policy`)
answers with `victims`. `policies/policy_for.py` chooses the policy by what the plans say:

- `planned`: whole epochs. Objects that the epoch still has to read stay. Which others stay over its
  end is planned once per epoch by `retention`; `sampling` computes the rate of each priority.
- `farthest`: streams with repeats. Objects with the farthest next use leave first.
- `recent`: later reads are unknown. The objects read last leave first.

Nodes that serve each other have the policies in `policies/cluster/`: `eviction`, `homes` and
`jobs`.
"""
