//! Any bytes as the shadow of an image.
//! The decoder returns an error or a value, and never panics.
#![no_main]

use azekura::testing::{FuzzDecoder, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drop(decode(FuzzDecoder::PoolShadow, bytes)));
