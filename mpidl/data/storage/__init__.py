"""Read data from object stores, such as S3, through fsspec.

A path with a protocol, such as s3://bucket/prefix, is *remote*. Only the module `store` uses
fsspec. It imports fsspec at the first access to a remote path.
"""
