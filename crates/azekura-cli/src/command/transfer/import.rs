//! `import`: into a partition.

use crate::args::{Format, ImportArgs};
use crate::command::transfer::{from_dir, from_lines};
use crate::failure::{Answer, Result};
use crate::output::Output;

/// Stores a directory or JSON lines.
pub(crate) fn import(args: &ImportArgs, output: &mut Output) -> Result<Answer> {
    let by_kind = if args.source.is_dir() { Format::Dir } else { Format::Jsonl };
    let moved = match args.format.unwrap_or(by_kind) {
        Format::Dir => from_dir::import(&args.source, &args.map, output.json())?,
        Format::Jsonl => from_lines::import(&args.source, &args.map, output.json())?,
    };
    moved.tell("stored", output)
}
