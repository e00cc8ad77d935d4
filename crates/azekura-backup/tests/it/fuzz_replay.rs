//! Any bytes give a value or an error: objects that a backup wrote, with random changes. The same decoders are targets
//! of `fuzz/`. `AZEKURA_FUZZ_SECONDS` (1 by default) says for how long, `AZEKURA_SEED` (1 by default) which changes.

use azekura::testing::SeededRng;
use azekura_backup::testing::{FuzzDecoder, decode};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const TARGETS: [(&str, FuzzDecoder); 3] =
    [("log", FuzzDecoder::Log), ("backups", FuzzDecoder::Backup), ("", FuzzDecoder::Store)];

#[test]
fn mutated_objects_are_harmless() {
    let variable = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (seconds, seed) = (variable("AZEKURA_FUZZ_SECONDS", 1), variable("AZEKURA_SEED", 1));
    for (i, (folder, decoder)) in TARGETS.into_iter().enumerate() {
        let input = golden_object(folder);
        decode(decoder, &input).unwrap();
        let (mut rng, start, mut count) = (SeededRng::with_stream(seed, i as u64), Instant::now(), 0);
        while count < 1000 || start.elapsed() < Duration::from_millis(seconds * 333) {
            let bytes = mutate(&input, &mut rng);
            if let Err(error) = decode(decoder, &bytes) {
                let kinds = ["corruption", "newer_version", "not_a_backup_store"];
                assert!(kinds.contains(&error.kind()), "AZEKURA_SEED={seed}: {error}: {bytes:?}");
            }
            count += 1;
        }
    }
}

#[test]
fn every_cut_and_flip_of_a_log_is_noticed() {
    let input = golden_object("log");
    for len in 0..input.len() {
        decode(FuzzDecoder::Log, &input[..len]).unwrap_err();
        let mut flipped = input.clone();
        for bit in 0..8 {
            flipped[len] ^= 1 << bit;
            decode(FuzzDecoder::Log, &flipped).unwrap_err();
            flipped[len] ^= 1 << bit;
        }
    }
    decode(FuzzDecoder::Log, &[&input[..], b"x"].concat()).unwrap_err();
}

fn golden_object(folder: &str) -> Vec<u8> {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/golden/v1").join(folder);
    let entries = golden.read_dir().unwrap().map(|entry| entry.unwrap().path());
    std::fs::read(entries.filter(|path| path.is_file()).max().unwrap()).unwrap()
}

fn mutate(input: &[u8], rng: &mut SeededRng) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(bytes.len() as u64 + 1) as usize;
        match rng.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, rng.below(256) as u8),
            2 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
            _ if at < bytes.len() => bytes[at] = rng.below(256) as u8,
            _ => {}
        }
    }
    bytes
}
