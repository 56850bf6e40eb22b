"""Slots: reusable shared buffers that carry finished batches from a worker to its trainer.

What moves. A slot is a prefaulted memfd. Its worker makes it (`SlotWriter`) and sends its
descriptor once, with the first batch in it; the trainer maps it (`SlotReader`). From then on only
its number goes to and fro:

    idle      the worker may write into it
    open      it holds parts of the batch that is being made (`room`, until `seal` or `abandon`)
    used      the trainer has the batch, and makes tensors over the slot without a copy (`lease`)
    returned  the last of these tensors is dead; the number waits for the worker's `give_back`

Slots are reused because fresh shared memory costs a page fault for every 4 KiB, far more than the
copy of a batch itself.

A tensor that is kept holds its slot. So that it holds little else, each part of 256 KiB or more
has a slot of its own, up to eight in a batch; the smaller ones share one, and those up to 16 KiB
are copied out. A slot much larger than a batch needs is not used for it, and freed after a while.

A worker keeps the slots of `max_slots` batches, and `MAX_NBYTES` of them. When all are in use, a
part goes into a *one-off*, which is freed with its last tensor: slower, but no batch waits. When
`max_leased` slots are leased, the trainer copies batches out. The next worker reuses the slots of
one that has ended, if the trainer forks it: a child has the same mappings (`SlotReader.unused`).

The trainer may lock the pages of a slot (`lock_pages`), so that a device copies out of them by
itself. It then holds the leases of a batch until these copies have ended, as no tensor tells that.

What may never happen.
* A slot is written while a tensor over it lives, in the trainer, or in a child that was forked
  meanwhile: a slot leased at a fork is never written again (`mark_shared`).
* Pages are unmapped that are locked: a lock belongs to the mapping, and ends just before it.
* A batch fails because a slot cannot be had: without memory or descriptors it travels otherwise.
* An access raises SIGBUS: memfds are sealed, and filled before they are mapped.
* The end of a tensor, in any thread, in the garbage collector or after `close`, takes a lock.

Who writes. The worker writes into a slot between `room` and `seal`, the trainer's code into its
tensors afterwards; never both. Where several ranks map one slot (`private`), what one of them
writes stays in its process. The state of `SlotWriter` belongs to the worker's thread. That of
`SlotReader` belongs to the thread that receives batches, but for the end of a lease, which drops
what belongs to the lease and appends the number to a deque.
"""
