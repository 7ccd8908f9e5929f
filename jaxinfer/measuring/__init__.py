"""How fast a model runs here, and how fast the machine could: for `jaxinfer bench` and the benchmarks."""
