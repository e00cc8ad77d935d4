//! Entries become JSON lines, in the form that `import` reads and `scan --json` prints.

use std::fs::{self, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::Path;

use azekura::Partition;
use serde_json::{Map, Value};

use crate::command::transfer::moved::Moved;
use crate::encoding;
use crate::failure::{Answer, Failure, Result};
use crate::output::Output;
use crate::progress::Progress;

/// Writes a new file.
pub(crate) fn export_to_file(partition: &Partition, target: &Path, json: bool) -> Result<Moved> {
    let failed = |e| Failure::os("write the file", target, e);
    let file = OpenOptions::new().write(true).create_new(true).open(target);
    let mut out = BufWriter::with_capacity(256 << 10, file.map_err(|e| Failure::os("create the file", target, e))?);
    let progress = Progress::entries(json, partition.approximate_len(), "Exporting");
    let mut write_all = || -> Result<Moved> {
        let mut moved = Moved::default();
        for entry in partition.iter() {
            let (key, value) = entry?;
            writeln!(out, "{}", line(&key, &value)).map_err(failed)?;
            moved.entries += 1;
            moved.bytes += (key.len() + value.len()) as u64;
            progress.add(1);
        }
        out.flush().map_err(failed)?;
        Ok(moved)
    };
    // A file that ends early would look like a whole one.
    write_all().inspect_err(|_| drop(fs::remove_file(target)))
}

/// Writes to standard output, and nothing else there.
pub(crate) fn export_to_output(partition: &Partition, output: &mut Output) -> Result<Answer> {
    for entry in partition.iter() {
        let (key, value) = entry?;
        output.line(line(&key, &value))?;
    }
    Ok(Answer::Yes)
}

fn line(key: &[u8], value: &[u8]) -> Value {
    let mut object = Map::new();
    encoding::put_json(&mut object, "key", key, false);
    encoding::put_json(&mut object, "value", value, false);
    Value::Object(object)
}
