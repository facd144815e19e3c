"""From a datastore to mini-batches: caches, the pixel pipeline, worker threads, the GPU's queue."""
