"""Files for TensorBoard: scalars, HParams, custom charts."""
