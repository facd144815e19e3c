"""The version of mpidl's arithmetic: releases with the same number train the same weights.

The number increases if a release trains other bytes from the same data, options and seed.
"""

VERSION = 1
