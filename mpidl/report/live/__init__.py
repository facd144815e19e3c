"""The live page of runs: a reader of run folders, a page made with Bokeh, and its server.

The page reads and writes only files of the runs' folders. `page` and `server` need Bokeh and are
imported only when a server starts.
"""
