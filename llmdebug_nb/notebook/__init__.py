"""Inside Jupyter: magics, and the explorer widget. The only home of Jupyter packages."""
