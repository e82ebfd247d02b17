//! What only the asynchronous half has.
