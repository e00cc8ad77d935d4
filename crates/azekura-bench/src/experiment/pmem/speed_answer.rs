//! What the rounds of `memory-speed` say.

use crate::experiment::pmem::speed::Who;
use crate::experiment::rounds::Rounds;
use serde_json::{Map, Value, json};

/// What is told of everybody, in nanoseconds and bytes.
const TOLD: [&str; 8] = [
    "put_ns",
    "get_ns",
    "miss_ns",
    "scan_ns",
    "scan_back_ns",
    "overhead_bytes_pool",
    "overhead_bytes_held",
    "overhead_bytes_file",
];
/// Figures that have a goal: their name, whose they are, of which field, by how much it is multiplied, and the most.
const GOALS: [(&str, &str, &str, f64, f64); 6] = [
    ("get_us", "pool", "get_ns", 1e-3, 0.7),
    ("insert_us_without_log", "pool", "put_ns", 1e-3, 1.0),
    ("scan_ns_per_entry", "pool", "scan_ns", 1.0, 40.0),
    ("open_ms_in_memory", "open_pool", "ms", 1.0, 50.0),
    ("overhead_bytes_in_memory", "logged", "overhead_bytes_pool", 1.0, 40.0),
    ("overhead_bytes_in_file", "logged", "overhead_bytes_file", 1.0, 40.0),
];
const GETS_VS_LMDB: f64 = 2.0;
const BUFFER_PUTS_PER_S: f64 = 800_000.0;
const OPEN_VS_READ: f64 = 1.2;

/// Figures named after the goals, then how everybody else stands to us, then all figures of everybody.
pub(super) fn put(answer: &mut Map<String, Value>, all: &Rounds, everybody: &[Who]) {
    let mut targets = Map::new();
    let level = all.json()["pool"][0]["stats"]["pool"]["level"].clone();
    // Where files are no memory there is a log, and what was asked was not measured.
    let in_memory = level != "Logged";
    answer.insert("pool_level".into(), level);
    for (field, who, of, factor, most) in GOALS {
        let is = all.median(who, of).map(|figure| figure * factor).filter(|_| in_memory || who == "logged");
        answer.insert(field.into(), json!(is));
        targets.insert(field.into(), target("at_most", most, is));
    }
    let puts = all.median("logged", "put_ns").filter(|ns| *ns > 0.0).map(|ns| 1e9 / ns);
    answer.insert("buffer_puts_per_s".into(), json!(puts));
    targets.insert("buffer_puts_per_s".into(), target("at_least", BUFFER_PUTS_PER_S, puts));
    for who in everybody.iter().map(|who| who.name()).filter(|name| *name != "pool") {
        // Theirs over ours: above 1 the pool is faster.
        for (name, field) in [("gets", "get_ns"), ("puts", "put_ns"), ("scan", "scan_ns")] {
            all.put_ratio(answer, &format!("{name}_vs_{who}"), field, who, "pool");
        }
    }
    for who in ["heed", "redb", "btreemap"] {
        all.put_ratio(answer, &format!("buffer_puts_vs_{who}"), "put_ns", who, "logged");
    }
    all.put_ratio(answer, "open_vs_read", "ms", "open_cold_logged", "read_cold_logged");
    all.put_ratio(answer, "open_vs_read_cached", "ms", "open_logged", "read_logged");
    all.put_ratio(answer, "baseline_vs_peer", "get_ns", "btreemap", "heed");
    for (field, word, goal) in [("gets_vs_heed", "at_least", GETS_VS_LMDB), ("open_vs_read", "at_most", OPEN_VS_READ)] {
        let is = answer.get(field).and_then(Value::as_f64);
        targets.insert(field.into(), target(word, goal, is));
    }
    answer.insert("targets".into(), targets.into());
    for who in everybody.iter().map(|who| who.name()) {
        for field in TOLD {
            if let Some(figure) = all.median(who, field) {
                answer.insert(format!("{field}_{who}"), json!(figure));
            }
        }
    }
    for step in ["open_pool", "open_logged", "read_logged", "open_cold_logged", "read_cold_logged"] {
        answer.insert(format!("{step}_ms"), json!(all.median(step, "ms")));
    }
}

/// What is wanted, what came out, and whether that is enough; null where nothing was measured.
fn target(word: &str, goal: f64, is: Option<f64>) -> Value {
    let met = is.map(|is| if word == "at_most" { is <= goal } else { is >= goal });
    json!({word: goal, "is": is, "met": met})
}

#[cfg(test)]
mod tests {
    use super::put;
    use crate::experiment::pmem::speed::Who;
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};

    fn rounds(who: &[Who]) -> Rounds {
        let mut all = Rounds::default();
        let mut add = |name: &str, round: Value| all.add(name, round.as_object().unwrap().clone());
        for (who, ns) in who.iter().zip([500.0, 2000.0, 800.0, 1500.0]) {
            let round = json!({
                "put_ns": ns, "get_ns": ns, "scan_ns": ns / 10.0, "overhead_bytes_pool": 30.0, "held_bytes": 1,
                "overhead_bytes_file": 50.0,
            });
            add(who.name(), round);
        }
        for (step, ms) in [("open_pool", 40.0), ("open_cold_logged", 300.0), ("read_cold_logged", 200.0)] {
            add(step, json!({"ms": ms}));
        }
        all
    }

    #[test]
    fn goals_have_their_figures_and_others_are_compared() {
        let who = [Who::Pool, Who::Logged, Who::BTreeMap, Who::Peer(0)];
        let mut answer = Map::new();
        put(&mut answer, &rounds(&who), &who);
        for (field, expected) in [
            ("get_us", json!(0.5)),
            ("scan_ns_per_entry", json!(50.0)),
            ("buffer_puts_per_s", json!(500_000.0)),
            ("gets_vs_heed", json!(3.0)),
            ("gets_vs_btreemap", json!(1.6)),
            ("buffer_puts_vs_heed", json!(0.75)),
            ("buffer_puts_vs_redb", Value::Null),
            ("open_vs_read", json!(1.5)),
            ("open_pool_ms", json!(40.0)),
            ("put_ns_heed", json!(1500.0)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        let targets = &answer["targets"];
        for (field, met) in [
            ("get_us", true),
            ("gets_vs_heed", true),
            ("scan_ns_per_entry", false),
            ("buffer_puts_per_s", false),
            ("open_vs_read", false),
            ("open_ms_in_memory", true),
            ("overhead_bytes_in_memory", true),
            ("overhead_bytes_in_file", false),
        ] {
            assert_eq!(targets[field]["met"], met, "{field}: {targets}");
        }
    }

    #[test]
    fn what_was_not_measured_is_null() {
        let who = [Who::Pool];
        let mut all = rounds(&who);
        let mut answer = Map::new();
        put(&mut answer, &all, &who);
        assert_eq!((&answer["get_us"], &answer["targets"]["get_us"]["met"]), (&json!(0.5), &json!(true)));
        assert_eq!(answer["targets"]["gets_vs_heed"], json!({"at_least": 2.0, "is": null, "met": null}));
        assert_eq!((&answer["buffer_puts_per_s"], &answer["baseline_vs_peer"]), (&Value::Null, &Value::Null));
        let mut logged = Rounds::default();
        let round = json!({"get_ns": 500.0, "stats": {"pool": {"level": "Logged"}}});
        logged.add("pool", round.as_object().unwrap().clone());
        all = logged;
        put(&mut answer, &all, &who);
        assert_eq!(answer["targets"]["get_us"]["is"], Value::Null, "it had a log");
    }
}
