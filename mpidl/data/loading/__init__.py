"""From a datastore to mini-batches: worker threads, the pixel pipeline, caches, the GPU's queue."""
