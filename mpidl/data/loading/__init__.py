"""Load mini-batches from datastores: cache, pixel pipeline, worker threads and GPU queue."""
