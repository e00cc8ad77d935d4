//! JSON lines become entries.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use serde_json::Value;

use crate::args::MapArgs;
use crate::command::transfer::load::Load;
use crate::command::transfer::moved::Moved;
use crate::encoding;
use crate::failure::{Failure, Result};
use crate::progress::Progress;

/// Stores every line of a file, or of standard input if `source` is "-".
pub(crate) fn import(source: &Path, map: &MapArgs, json: bool) -> Result<Moved> {
    if source == Path::new("-") {
        return read_lines(io::stdin().lock(), source, Load::new(map, Progress::bytes(json, 0, "Importing")));
    }
    let file = File::open(source).map_err(|e| Failure::os("open the input", source, e))?;
    let length = file.metadata().map_or(0, |data| data.len());
    let load = Load::new(map, Progress::bytes(json, length, "Importing"));
    read_lines(BufReader::with_capacity(256 << 10, file), source, load)
}

fn read_lines(mut input: impl BufRead, source: &Path, mut load: Load<'_>) -> Result<Moved> {
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        let n = input.read_until(b'\n', &mut line).map_err(|e| Failure::os("read the input", source, e))?;
        if n == 0 {
            break;
        }
        load.progress().add(n as u64);
        if line.trim_ascii().is_empty() {
            continue;
        }
        match parse(&line) {
            Ok((key, value)) => load.put(&key, &value, || format!("line {number}"))?,
            Err(why) => {
                let before = load.give_up()?.entries;
                let message = format!("line {number} is no entry: {why}; the {before} before it were stored");
                return Err(Failure::Input { file: source.to_path_buf(), message });
            }
        }
    }
    load.finish()
}

fn parse(line: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
    match serde_json::from_slice(line) {
        Ok(Value::Object(mut object)) => {
            Ok((encoding::take_json(&mut object, "key")?, encoding::take_json(&mut object, "value")?))
        }
        Ok(_) => Err("it is not a JSON object".into()),
        Err(error) => Err(error.to_string()),
    }
}
