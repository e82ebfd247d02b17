//! The guide: which primitive when, and what each leaves open.
//!
//! [`recipes`] has code to copy, [`poolers`] the arithmetic of connection pools, [`interop`] the keys
//! of Rails, Django and Node, [`growing`] what changes on managed and distributed databases.
//!
#![doc = include_str!("../docs/guide.md")]

#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {}

#[doc = include_str!("../docs/poolers.md")]
pub mod poolers {}

#[doc = include_str!("../docs/interop.md")]
pub mod interop {}

#[doc = include_str!("../docs/growing.md")]
pub mod growing {}
