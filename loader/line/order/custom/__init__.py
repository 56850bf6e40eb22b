"""Samplers that are not torch's: their orders, copies that run ahead, and their place."""
