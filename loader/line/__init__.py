"""The line of batches: order, steps of the session, batches, and what observes them."""
