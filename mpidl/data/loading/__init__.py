"""Load mini-batches from datastores: caches, pixel pipeline, worker threads and GPU queue."""
