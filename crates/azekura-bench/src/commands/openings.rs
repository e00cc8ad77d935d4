//! `open` and `partitions`: how long databases take to open; `device`: the machine alone.

use crate::cli::{Common, Engines, Open, Partitions};
use crate::engine::Options;
use crate::engine::api::object;
use crate::error::Result;
use crate::measure::device::Conditions;
use crate::measure::disk::Scratch;
use crate::report::table;
use crate::task::comparison::ask;
use crate::task::measure::harness_cost;
use crate::task::plan::{Job, Task};
use crate::workload::data::SMALL_RECORDS;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// With memtables as small as the tables of `open`, Fjall 3.1.13 stops for good: writer and workers both wait.
const MEMTABLE_PER_TABLE: u64 = 64;
/// Time limit of a child: building thousands of tables takes some engines minutes.
const LONGEST: Duration = Duration::from_secs(3600);

/// Times the opening of a database of many tables, which is built once.
pub(crate) fn open(open: &Open) -> Result<()> {
    let memtable_bytes = open.table_size.saturating_mul(MEMTABLE_PER_TABLE);
    let options = open.engines.options(memtable_bytes, Some(open.table_size));
    let jobs = [Job::BuildTables(open.tables), Job::OpenTables];
    compare("open", &open.engines, &open.common, &options, jobs, false)
}

/// Times the creation of partitions, anew in each round, and their opening.
pub(crate) fn partitions(partitions: &Partitions) -> Result<()> {
    let options = partitions.engines.options(64 << 20, None);
    let jobs = [Job::CreatePartitions(partitions.count), Job::OpenPartitions(partitions.count)];
    compare("partitions", &partitions.engines, &partitions.common, &options, jobs, true)
}

/// Measures the device and prints the conditions.
pub(crate) fn device(common: &Common) -> Result<()> {
    let (_scratch, conditions) = begin(common)?;
    match common.json {
        true => println!("{}", json!(conditions)),
        false => print!("{}", table::conditions(&conditions)),
    }
    Ok(())
}

fn begin(common: &Common) -> Result<(Scratch, Conditions)> {
    let scratch = common.place.scratch()?;
    let conditions = Conditions::begin(&scratch.path, harness_cost(&SMALL_RECORDS), common.device_seconds)?;
    Ok((scratch, conditions))
}

fn compare(
    workload: &str,
    engines: &Engines,
    common: &Common,
    options: &Options,
    [first, second]: [Job; 2],
    anew: bool,
) -> Result<()> {
    let names = engines.names()?;
    let (scratch, mut conditions) = begin(common)?;
    let (mut firsts, mut rows): (BTreeMap<&str, Value>, Vec<Value>) = (BTreeMap::new(), Vec::new());
    for (round, engine) in (1..=engines.rounds).flat_map(|round| names.iter().map(move |engine| (round, engine))) {
        let name = format!("{engine}-opening");
        let perform = |dir: PathBuf, job: &Job| {
            let task = Task { engine: engine.clone(), dir, options: options.clone(), job: job.clone() };
            ask(&task, engines.limit().unwrap_or(LONGEST)).map_err(|error| format!("{engine}: {error}"))
        };
        if anew || !firsts.contains_key(engine.as_str()) {
            firsts.insert(engine, perform(scratch.fresh(&name)?, &first)?);
        }
        let mut row = object(json!({"engine": engine}));
        row.extend(object(firsts[engine.as_str()].clone()));
        row.extend(object(perform(scratch.path.join(&name), &second)?));
        eprintln!("{engine}: round {round} of {}: {}", engines.rounds, json!(row));
        rows.push(Value::Object(row));
    }
    conditions.finish(&scratch.path, common.device_seconds)?;
    if !common.json {
        print!("{}\n{}", table::openings(&rows), table::conditions(&conditions));
        return Ok(());
    }
    for mut row in rows {
        (row["workload"], row["conditions"]) = (json!(workload), json!(conditions));
        println!("{row}");
    }
    Ok(())
}
