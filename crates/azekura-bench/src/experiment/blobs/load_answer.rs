//! What the rounds of `blob-load` say.

use crate::experiment::blobs::load::Case;
use crate::experiment::rounds::Rounds;
use serde_json::{Map, Value, json};

/// Fields of every case: what they are called, in which variant, and by which field of its rounds.
const FIELDS: [(&str, &str, &str); 18] = [
    ("disk_bytes", "load", "disk_bytes"),
    ("disk_bytes_without_log", "load", "disk_bytes_without_log"),
    ("load_seconds", "load", "load_seconds"),
    ("write_amp", "load", "write_amp"),
    ("write_amp_with_log", "load", "write_amp_with_log"),
    ("kernel_write_amp", "load", "kernel_write_amp"),
    ("read_all_seconds", "read_all", "read_all_seconds"),
    ("zipf_p50_us", "zipf", "p50_us"),
    ("zipf_p99_us", "zipf", "p99_us"),
    ("zipf_reads_per_s", "zipf", "reads_per_s"),
    ("zipf_held_bytes", "zipf", "held_bytes"),
    ("cold_p50_us", "cold", "p50_us"),
    ("cold_p99_us", "cold", "p99_us"),
    ("cold_reads_per_s", "cold", "reads_per_s"),
    ("minute_p50_us", "minute", "p50_us"),
    ("minute_p99_us", "minute", "p99_us"),
    ("minute_reads_per_s", "minute", "reads_per_s"),
    ("minute_held_bytes", "minute", "held_bytes"),
];
/// So much memory an engine may hold beside its cache, and yet be one that keeps to it.
const BESIDE_CACHE: u64 = 32 << 20;
const UNCOMPRESSED: &str = "separated_none";
/// As pages would be kept by default.
const DEFAULT: &str = "separated_lz4";

/// Of reads with a cache of so many bytes, and all the rest.
pub(super) fn put(answer: &mut Map<String, Value>, all: &Rounds, cases: &[Case], cache_bytes: u64) {
    let frugal: Vec<Case> = frugal(all, cases, cache_bytes).collect();
    for field in ["write_amp", "write_amp_with_log"] {
        answer.insert(field.into(), json!(all.median(&format!("load_{UNCOMPRESSED}"), field)));
    }
    answer.insert("write_amp_is".into(), json!("bytes written to files per byte of keys and pages, until at rest"));
    put_disk(answer, all, cases);
    for (prefix, what) in [("", "zipf"), ("cold_", "cold"), ("minute_", "minute")] {
        put_reads(answer, all, (cases, &frugal), prefix, what);
    }
    answer.insert("frugal_peers".into(), json!(frugal.iter().map(|case| case.name()).collect::<Vec<_>>()));
    let peer = "zipf_peer_rocksdb"; // the one with the same codec and values apart
    all.put_ratio(answer, "baseline_vs_peer", "mean_us", &format!("zipf_{DEFAULT}"), peer);
    answer.insert("targets".into(), targets(answer));
    for (field, what, of) in FIELDS {
        for name in cases.iter().map(|case| case.name()) {
            let figure = all.median(&format!("{what}_{name}"), of);
            if figure.is_some() || !field.starts_with("write_amp") {
                answer.insert(format!("{field}_{name}"), json!(figure));
            }
        }
    }
}

/// The case with the least or the largest figure.
fn best(all: &Rounds, cases: impl Iterator<Item = Case>, what: &str, field: &str, largest: bool) -> Option<String> {
    let figures = cases.filter_map(|case| Some((all.median(&format!("{what}_{}", case.name()), field)?, case.name())));
    let sign = if largest { -1.0 } else { 1.0 };
    figures.min_by(|a, b| (sign * a.0).total_cmp(&(sign * b.0))).map(|(_, name)| name)
}

/// Bytes on disk of our smallest case, and of the default, for each of the smallest peer.
fn put_disk(answer: &mut Map<String, Value>, all: &Rounds, cases: &[Case]) {
    for (prefix, field) in [("disk", "disk_bytes"), ("disk_without_log", "disk_bytes_without_log")] {
        let least = |peer: bool| best(all, cases.iter().copied().filter(|c| c.is_peer() == peer), "load", field, false);
        let (ours, peer) = (least(false), least(true));
        answer.insert(format!("{prefix}_best_case"), json!(ours));
        answer.insert(format!("{prefix}_best_peer"), json!(peer));
        let variant = |name: Option<String>| format!("load_{}", name.unwrap_or_default());
        let (ours, peer) = (variant(ours), variant(peer));
        all.put_ratio(answer, &format!("{prefix}_vs_best_peer"), field, &ours, &peer);
        all.put_ratio(answer, &format!("default_{prefix}_vs_best_peer"), field, &variant(Some(DEFAULT.into())), &peer);
    }
}

/// Peers that hold not much more memory than the cache that they are given.
fn frugal<'a>(all: &'a Rounds, cases: &'a [Case], cache_bytes: u64) -> impl Iterator<Item = Case> + 'a {
    let held = |case: Case| all.median(&format!("zipf_{}", case.name()), "held_bytes");
    let most = (cache_bytes + BESIDE_CACHE) as f64;
    cases.iter().copied().filter(move |case| case.is_peer() && held(*case).is_some_and(|held| held <= most))
}

/// Reads per second of our best case per those of the best peer, and per those of the best one that keeps to its
/// cache; of the default too.
fn put_reads(
    answer: &mut Map<String, Value>,
    all: &Rounds,
    (cases, frugal): (&[Case], &[Case]),
    prefix: &str,
    what: &str,
) {
    let best = |cases: &mut dyn Iterator<Item = Case>| best(all, cases, what, "reads_per_s", true);
    let ours = best(&mut cases.iter().copied().filter(|case| !case.is_peer()));
    let peer = best(&mut cases.iter().copied().filter(|case| case.is_peer()));
    let frugal = best(&mut frugal.iter().copied());
    for (field, name) in [("reads_best_case", &ours), ("reads_best_peer", &peer), ("reads_best_frugal_peer", &frugal)] {
        answer.insert(format!("{prefix}{field}"), json!(name));
    }
    let variant = |name: Option<String>| format!("{what}_{}", name.unwrap_or_default());
    let (ours, peer, frugal) = (variant(ours), variant(peer), variant(frugal));
    let default = variant(Some(DEFAULT.into()));
    for (field, top, bottom) in [
        ("reads_vs_best_peer", &ours, &peer),
        ("default_reads_vs_best_peer", &default, &peer),
        ("reads_vs_best_frugal_peer", &ours, &frugal),
        ("default_reads_vs_best_frugal_peer", &default, &frugal),
    ] {
        all.put_ratio(answer, &format!("{prefix}{field}"), "reads_per_s", top, bottom);
    }
}

/// What is wanted, what came out, and whether that is enough; null where there is nothing to compare with.
fn targets(answer: &Map<String, Value>) -> Value {
    let mut targets = Map::new();
    for (field, wanted, most) in [
        ("write_amp", 1.1, true),
        ("disk_vs_best_peer", 1.0, true),
        ("reads_vs_best_peer", 1.0, false),
        ("cold_reads_vs_best_peer", 1.0, false),
        ("minute_reads_vs_best_peer", 1.0, false),
    ] {
        let is = answer.get(field).and_then(Value::as_f64);
        let met = is.map(|is| if most { is <= wanted } else { is >= wanted });
        let word = if most { "at_most" } else { "at_least" };
        targets.insert(field.into(), json!({word: wanted, "is": is, "met": met}));
    }
    targets.into()
}

#[cfg(test)]
mod tests {
    use super::put;
    use crate::experiment::blobs::load::{Case, Codec};
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};

    const SEPARATED: [Codec; 2] = [Codec::None, Codec::Lz4];

    fn rounds(with_peers: bool) -> (Rounds, Vec<Case>) {
        let mut cases: Vec<Case> = SEPARATED.map(|codec| Case::Ours { separated: true, codec }).to_vec();
        if with_peers {
            cases.extend([Case::Peer(0), Case::Peer(1)]);
        }
        let mut all = Rounds::default();
        let mut add = |name: &str, round: Value| all.add(name, round.as_object().unwrap().clone());
        for (case, figure) in cases.iter().zip([4.0, 2.0, 10.0, 3.0]) {
            let name = case.name();
            let (disk, own) = (figure * 100.0, figure * 100.0 - 100.0);
            let load = json!({"disk_bytes": disk, "disk_bytes_without_log": own, "load_seconds": figure});
            add(&format!("load_{name}"), load);
            add(&format!("read_all_{name}"), json!({"read_all_seconds": figure}));
            for what in ["zipf", "cold", "minute"] {
                let mut round = json!({"reads_per_s": figure * 10.0, "mean_us": 1.0 / figure, "p50_us": figure});
                round["held_bytes"] = json!(figure * 5e6);
                add(&format!("{what}_{name}"), round);
            }
        }
        let mut again = Rounds::default();
        let own = json!({"write_amp": 1.25, "write_amp_with_log": 2.5, "disk_bytes": 400.0});
        again.add("load_separated_none", own.as_object().unwrap().clone());
        again.extend(all);
        (again, cases)
    }

    fn answer(with_peers: bool) -> Map<String, Value> {
        let (all, cases) = rounds(with_peers);
        let mut answer = Map::new();
        put(&mut answer, &all, &cases, 1 << 20);
        answer
    }

    #[test]
    fn the_best_of_ours_stands_beside_the_best_peer() {
        let answer = answer(true);
        for (field, expected) in [
            ("write_amp", json!(1.25)),
            ("write_amp_with_log", json!(2.5)),
            ("disk_best_peer", json!("peer_rocksdb")),
            ("disk_vs_best_peer", json!(2.0 / 3.0)),
            ("disk_best_case", json!("separated_lz4")),
            ("default_disk_without_log_vs_best_peer", json!(0.5)),
            ("reads_best_case", json!("separated_none")),
            ("reads_best_peer", json!("peer_fjall")),
            ("reads_vs_best_peer", json!(0.4)),
            ("cold_reads_vs_best_peer", json!(0.4)),
            ("minute_default_reads_vs_best_peer", json!(0.2)),
            ("frugal_peers", json!(["peer_rocksdb"])),
            ("reads_vs_best_frugal_peer", json!(4.0 / 3.0)),
            ("baseline_vs_peer", json!(1.5)),
            ("disk_bytes_peer_fjall", json!(1000.0)),
            ("zipf_p50_us_separated_lz4", json!(2.0)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        assert!(!answer.contains_key("write_amp_peer_fjall"), "nobody counted it");
        let targets = &answer["targets"];
        assert_eq!(targets["write_amp"], json!({"at_most": 1.1, "is": 1.25, "met": false}));
        assert_eq!(targets["disk_vs_best_peer"]["met"], true);
        assert_eq!(targets["reads_vs_best_peer"]["met"], false);
    }

    #[test]
    fn without_peers_nothing_is_compared() {
        let answer = answer(false);
        for field in ["disk_vs_best_peer", "reads_vs_best_peer", "disk_best_peer", "baseline_vs_peer"] {
            assert_eq!(answer[field], Value::Null, "{field}");
        }
        assert_eq!(answer["targets"]["reads_vs_best_peer"], json!({"at_least": 1.0, "is": null, "met": null}));
    }
}
