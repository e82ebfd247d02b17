//! The guide: a tutorial, recipes, explanations and the reference.
#![doc = ""]
#![doc = include_str!("../docs/guide.md")]

/// A tutorial: from an empty project to a job on two instances.
#[doc = ""]
#[doc = include_str!("../docs/tutorial.md")]
pub mod tutorial {}

/// How-to: code to copy.
#[doc = ""]
#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {}

/// How-to: the same with diesel-async, and what a dropped future leaves behind.
#[doc = ""]
#[cfg_attr(feature = "deadpool", doc = include_str!("../docs/asynchronous.md"))]
#[cfg_attr(
    not(feature = "deadpool"),
    doc = "`cargo doc --features deadpool` shows this page, because it links to what that feature adds."
)]
pub mod asynchronous {}

/// How-to: rate limits of web applications, as layers of axum and actix-web.
#[doc = ""]
#[doc = include_str!("../docs/rate_limits.md")]
pub mod rate_limits {}

/// How-to: a checklist for the first deployment.
#[doc = ""]
#[doc = include_str!("../docs/production.md")]
pub mod production {}

/// How-to: what each error means and what to do.
#[doc = ""]
#[doc = include_str!("../docs/troubleshooting.md")]
pub mod troubleshooting {}

/// Explanation: why the primitives behave as they do.
#[doc = ""]
#[doc = include_str!("../docs/explanation.md")]
pub mod explanation {}

/// Explanation: pool sizes, PgBouncer and its like.
#[doc = ""]
#[doc = include_str!("../docs/poolers.md")]
pub mod poolers {}

/// Explanation: managed databases, failover, dead hosts, large tables, other engines.
#[doc = ""]
#[doc = include_str!("../docs/growing.md")]
pub mod growing {}

/// Explanation: other libraries, with code on both sides.
#[doc = ""]
// Its examples have code of both halves.
#[cfg_attr(any(not(doctest), feature = "deadpool"), doc = include_str!("../docs/comparison.md"))]
pub mod comparison {}

/// Reference: events, settings, SQL functions, limits, guarantees, hazards.
#[doc = ""]
#[doc = include_str!("../docs/reference.md")]
pub mod reference {}

/// Reference: Ruby, Python, Node and psql.
#[doc = ""]
#[doc = include_str!("../docs/interop.md")]
pub mod interop {}

/// Reference: measurements.
#[doc = ""]
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}
