"""The arguments of `creel.DataLoader` that torch's class has not."""
