//! What only the blocking half has.
