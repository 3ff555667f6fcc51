"""Work on a Dask cluster: its workers read their shards, and what they can't do is done here."""
