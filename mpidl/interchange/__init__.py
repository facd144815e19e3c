"""Read and write weights and networks in the file formats of other libraries."""
