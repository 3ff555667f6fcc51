"""What all rooms share: nouns, constants, options, errors, paths, dtypes, numeric kernels."""
