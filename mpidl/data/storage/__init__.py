"""Read data from object stores, such as S3, through fsspec.

A path with a protocol, such as s3://bucket/prefix, is *remote*. Only `store` uses fsspec, which is
imported at the first access to a remote path.
"""
