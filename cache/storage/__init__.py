"""Storage of datasets: manifests, reading objects, retries and versions."""
