//! One module per behaviour, the same over each pool.
