//! From a name to a number, in the ways of this crate and of its neighbours.

use std::hash::Hasher;

/// 64-bit FNV-1a, reinterpreted as the signed number that PostgreSQL's `bigint` is.
pub(super) fn fnv1a(name: &str) -> i64 {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(name.as_bytes());
    i64::from_ne_bytes(hasher.finish().to_ne_bytes())
}

/// CRC-32 as zlib computes it, unsigned.
pub(super) fn crc32(name: &str) -> u32 {
    crc32fast::hash(name.as_bytes())
}

/// The first eight bytes of SHA-256.
#[cfg(feature = "sha2")]
pub(super) fn sha256(name: &str) -> [u8; 8] {
    let digest = <sha2::Sha256 as sha2::Digest>::digest(name);
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    first
}

/// `hash * 31 + unit` over UTF-16 code units, wrapping in 32 bits, as JavaScript's `(hash << 5) -
/// hash + unit | 0` does it.
pub(super) fn times31(name: &str) -> i32 {
    name.encode_utf16().fold(0, |hash: i32, unit| {
        hash.wrapping_mul(31).wrapping_add(i32::from(unit))
    })
}
