"""A person's objects and values, as creel looks at them beyond what torch does."""
