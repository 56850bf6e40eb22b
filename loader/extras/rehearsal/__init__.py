"""Rehearsal in a training process: `memory` is what a person holds, `rehearsed` its datasets.

`loader/line/order/rehearsing` adds the memory's rows to each batch. Decisions are in
`policies/rehearsal/`.
"""
