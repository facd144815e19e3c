"""The live page of runs: a reader of run folders, a page made with Bokeh, and its server.

The page reads and writes only files in the runs' folders. `page` and `server` need Bokeh, so they
are imported only when a server starts.
"""
