//! `import` and `export`: entries as a directory or as JSON lines, byte for byte both ways.
//!
//! Rooms: `load` (batches of puts and what had to be left out), `from_dir`, `from_lines`, `to_dir`, `to_lines`.

mod from_dir;
mod from_lines;
mod load;
mod to_dir;
mod to_lines;

use std::path::Path;

use serde_json::json;

use crate::args::{ExportArgs, Format, ImportArgs};
use crate::display;
use crate::failure::{Answer, Result};
use crate::open;
use crate::output::Output;

/// What was moved, and what was left out and why.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    entries: u64,
    bytes: u64,
    left_out: Vec<(String, String)>,
}

/// Stores a directory or JSON lines.
pub(crate) fn import(args: &ImportArgs, output: &mut Output) -> Result<Answer> {
    let by_kind = if args.source.is_dir() { Format::Dir } else { Format::Jsonl };
    let moved = match args.format.unwrap_or(by_kind) {
        Format::Dir => from_dir::import(&args.source, &args.map, output.json())?,
        Format::Jsonl => from_lines::import(&args.source, &args.map, output.json())?,
    };
    tell(&moved, "stored", output)
}

/// Writes a partition out.
pub(crate) fn export(args: &ExportArgs, output: &mut Output) -> Result<Answer> {
    let lines = args.target == Path::new("-")
        || args.target.extension().is_some_and(|e| ["jsonl", "ndjson", "json"].iter().any(|known| e == *known));
    let by_name = if lines { Format::Jsonl } else { Format::Dir };
    let (_db, partition) = open::map_to_read(&args.map)?;
    match args.format.unwrap_or(by_name) {
        Format::Dir => tell(&to_dir::export(&partition, &args.target, output.json())?, "written", output),
        Format::Jsonl if args.target == Path::new("-") => to_lines::export_to_output(&partition, output),
        Format::Jsonl => tell(&to_lines::export_to_file(&partition, &args.target, output.json())?, "written", output),
    }
}

fn tell(moved: &Moved, verb: &str, output: &mut Output) -> Result<Answer> {
    if output.json() {
        let left_out: Vec<_> =
            moved.left_out.iter().map(|(name, why)| json!({ "name": name, "reason": why })).collect();
        output.line(json!({ "entries": moved.entries, "bytes": moved.bytes, "left_out": left_out }))?;
    } else {
        output.line(format!("{}, {} {verb}", display::plural(moved.entries, "entry"), display::bytes(moved.bytes)))?;
        for (name, why) in &moved.left_out {
            eprintln!("azekura: left out {name}: {why}");
        }
    }
    Ok(Answer::yes_if(moved.left_out.is_empty()))
}
