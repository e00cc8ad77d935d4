//! Any bytes as the file of a pool, as memory or an image: an error or a value, never a panic.
#![no_main]

use azekura::inspect::{FuzzDecoder, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drop(decode(FuzzDecoder::Pool, bytes)));
