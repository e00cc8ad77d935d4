//! What the rounds of `zero-copy-split` say.

use crate::experiment::pmem::split::{Case, Kind, PEER};
use crate::experiment::rounds::Rounds;
use crate::report::draw::chart::{self, Line};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Per split: how the figure is called, and what it is the mean of.
pub(super) const PER_SPLIT: [(&str, &str); 3] = [
    ("bytes_moved_per_split", "split_stored_bytes"),
    ("flushed_lines_per_split", "split_flushed_lines"),
    ("fences_per_split", "split_fences"),
];
/// What is told of each case.
const TOLD: [&str; 6] = ["put_us", "bytes_per_record", "splits", PER_SPLIT[0].0, PER_SPLIT[1].0, PER_SPLIT[2].0];
/// Ratios, and the fields they are of.
const RATIOS: [(&str, &str); 2] = [("time_ratio", "seconds"), ("storage_ratio", "bytes_per_record")];
/// What the document says, and the most that is wanted of ours.
const DOCUMENT: [(&str, Option<f64>, f64); 4] = [
    ("time_ratio_20_800", Some(0.63), 0.63),
    ("storage_ratio_20_800", Some(0.80), 0.80),
    ("storage_ratio_20_15", Some(1.35), 1.0),
    ("storage_ratio_10_4", None, 1.0),
];

/// Ratios to copy-or-swap, then everything that was counted.
pub(super) fn put(answer: &mut Map<String, Value>, all: &Rounds, cases: &[Case]) {
    let variant = |kind: Kind, records: &str| format!("{}_{records}", kind.name());
    let mut seen: Vec<String> = cases.iter().map(Case::records).collect();
    seen.dedup();
    for (ratio, field) in RATIOS {
        for records in &seen {
            let base = variant(Kind::CopyOrSwap, records);
            let mut put = |name: &str, top: &str, base: &str| all.put_ratio(answer, name, field, top, base);
            let name = format!("{ratio}_{records}");
            put(&name, &variant(Kind::Ours, records), &base);
            put(&format!("{name}_slots"), &variant(Kind::Slots, records), &base);
            put(&format!("{name}_vs_naive_copy"), &variant(Kind::Ours, records), &variant(Kind::NaiveCopy, records));
        }
    }
    all.put_ratio(
        answer,
        "time_ratio_20_800_unflushed",
        "seconds",
        &variant(Kind::Unflushed, "20_800"),
        &variant(Kind::CopyOrSwap, "20_800"),
    );
    all.put_ratio(
        answer,
        "baseline_vs_peer",
        "seconds",
        &variant(Kind::CopyOrSwap, "20_800"),
        &format!("{PEER}_20_800"),
    );
    answer.insert("targets".into(), targets(answer));
    for field in TOLD {
        for case in cases {
            if let Some(figure) = all.median(&case.name(), field) {
                answer.insert(format!("{field}_{}", case.name()), json!(figure));
            }
        }
    }
}

/// What the document found, what is wanted, what came out, and whether that is enough.
fn targets(answer: &Map<String, Value>) -> Value {
    let mut targets = Map::new();
    for (field, document, wanted) in DOCUMENT {
        let is = answer.get(field).and_then(Value::as_f64);
        let slots = answer.get(&format!("{field}_slots")).and_then(Value::as_f64);
        let met = is.map(|is| is <= wanted);
        targets.insert(
            field.into(),
            json!({"document": document, "its_own_slots": slots, "at_most": wanted, "is": is, "met": met}),
        );
    }
    targets.into()
}

/// A line for each case.
pub(super) fn csv(all: &Rounds, cases: &[Case]) -> String {
    let mut text = format!("leaves,key_bytes,value_bytes,order,{}\n", TOLD.join(","));
    for case in cases {
        let order = json!(case.order);
        let order = order.as_str().unwrap_or_default();
        let _ = write!(text, "{},{},{},{order}", case.kind.name(), case.key_len, case.value_len); // a string takes all
        for field in TOLD {
            let figure = all.median(&case.name(), field);
            let _ = write!(text, ",{}", figure.map_or_else(String::new, |figure| format!("{figure:.3}")));
        }
        text.push('\n');
    }
    text
}

/// Seconds over records of the document's own workload, in its first round.
pub(super) fn chart(all: &Rounds, cases: &[Case]) -> Option<String> {
    let rounds = all.json();
    let line = |case: &Case| {
        let course = rounds[case.name()][0]["course"].as_array()?;
        let point = |point: &Value| Some((point[1].as_f64()?, point[0].as_f64()?));
        Some(Line { engine: case.kind.name().replace('_', " "), points: course.iter().filter_map(point).collect() })
    };
    let lines: Vec<Line> = cases.iter().filter(|case| case.is_the_documents()).filter_map(line).collect();
    chart::alone("records of 20 + 800 bytes put in ascending order", "seconds", &lines)
}

#[cfg(test)]
mod tests {
    use super::{chart, csv, put};
    use crate::experiment::pmem::records::Order;
    use crate::experiment::pmem::split::{Case, Kind};
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};

    fn case(kind: Kind, key_len: usize, value_len: usize) -> Case {
        Case { kind, key_len, value_len, order: Order::Sequential }
    }

    fn rounds() -> (Rounds, Vec<Case>) {
        let cases = vec![
            case(Kind::CopyOrSwap, 20, 800),
            case(Kind::NaiveCopy, 20, 800),
            case(Kind::Slots, 20, 800),
            case(Kind::Ours, 20, 800),
            case(Kind::CopyOrSwap, 20, 15),
            case(Kind::Ours, 20, 15),
        ];
        let mut all = Rounds::default();
        for (case, figure) in cases.iter().zip([4.0, 8.0, 3.0, 2.0, 1.0, 1.5]) {
            let round = json!({
                "seconds": figure, "put_us": figure, "bytes_per_record": 100.0 * figure, "splits": 10,
                "fences_per_split": 5.5, "course": [[0, 0.0], [50, figure / 2.0], [100, figure]],
            });
            all.add(&case.name(), round.as_object().unwrap().clone());
        }
        (all, cases)
    }

    #[test]
    fn ratios_are_those_to_copy_or_swap_with_the_same_records() {
        let (all, cases) = rounds();
        let mut answer = Map::new();
        put(&mut answer, &all, &cases);
        for (field, expected) in [
            ("time_ratio_20_800", json!(0.5)),
            ("time_ratio_20_800_slots", json!(0.75)),
            ("time_ratio_20_800_vs_naive_copy", json!(0.25)),
            ("storage_ratio_20_15", json!(1.5)),
            ("storage_ratio_20_15_slots", Value::Null),
            ("time_ratio_20_800_unflushed", Value::Null),
            ("fences_per_split_slots_20_800", json!(5.5)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        let targets = &answer["targets"];
        assert_eq!(
            targets["time_ratio_20_800"],
            json!({"document": 0.63, "its_own_slots": 0.75, "at_most": 0.63, "is": 0.5, "met": true})
        );
        assert_eq!(
            (&targets["storage_ratio_20_15"]["met"], &targets["storage_ratio_10_4"]["met"]),
            (&json!(false), &Value::Null)
        );
        assert!(!answer.contains_key("bytes_moved_per_split_slots_20_800"), "nobody counted it");
    }

    #[test]
    fn every_case_is_a_line_of_the_table_and_the_documents_are_drawn() {
        let (all, cases) = rounds();
        let table = csv(&all, &cases);
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split(',').collect()).collect();
        assert!(lines.len() == 7 && lines.iter().all(|line| line.len() == 10), "{table}");
        assert_eq!(
            lines[1],
            ["copy_or_swap", "20", "800", "sequential", "4.000", "400.000", "10.000", "", "", "5.500"]
        );
        let svg = chart(&all, &cases).unwrap();
        let drawing = roxmltree::Document::parse(&svg).unwrap();
        assert_eq!(drawing.descendants().filter(|node| node.has_tag_name("polyline")).count(), 4);
        assert!(svg.contains(">copy or swap<") && svg.contains(">ours<"), "{svg}");
        assert!(chart(&Rounds::default(), &cases).is_none());
    }
}
