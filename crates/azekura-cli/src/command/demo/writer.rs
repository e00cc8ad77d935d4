//! The writer process, and its parent's side: start it, receive its acknowledgements, kill it.

use std::io::{self, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use azekura::{Config, DataBlockIndexType, Database, KvSeparationOptions, Partition, PartitionCreateOptions};

use super::input::{InputFiles, fingerprint};
use crate::args::WriterArgs;
use crate::error::{CliError, CommandOutcome, Result};
use crate::interrupt;

/// Length of a skipped file in an encoded [`AckRecord`].
const SKIPPED: u64 = u64::MAX;

/// Acknowledgement of one put that has returned: length and hash of the value. `None` if the file was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AckRecord {
    pub(super) len: u64,
    pub(super) hash: u64,
}

fn encode(ack: Option<AckRecord>) -> [u8; 16] {
    let (len, hash) = ack.map_or((SKIPPED, 0), |ack| (ack.len, ack.hash));
    (u128::from(len) | u128::from(hash) << 64).to_le_bytes()
}

/// Receives one record, or an error of kind `UnexpectedEof` at the end of the pipe, also within a record.
fn receive(pipe: &mut impl Read) -> io::Result<Option<AckRecord>> {
    let mut bytes = [0; 16];
    pipe.read_exact(&mut bytes)?;
    let both = u128::from_le_bytes(bytes);
    let (len, hash) = (both as u64, (both >> 64) as u64);
    Ok((len != SKIPPED).then_some(AckRecord { len, hash }))
}

/// Sum of the lengths of all acknowledged values.
pub(super) fn acknowledged_bytes(acks: &[Option<AckRecord>]) -> u64 {
    acks.iter().flatten().map(|ack| ack.len).sum()
}

/// Opens the demo's partition: values of 1 KiB and more in blob files, a hash index in each data block, and index and
/// filter partitions that the block cache loads on demand.
pub(super) fn open(path: &Path, memtable_bytes: u64) -> Result<(Database, Partition)> {
    let db = Config::new(path).open()?;
    let options = PartitionCreateOptions::default()
        .max_memtable_size(memtable_bytes)
        .data_block_index_type(DataBlockIndexType::BinaryAndHash)
        .partition_index_and_filters(true)
        .with_kv_separation(KvSeparationOptions::default());
    let partition = db.open_partition("default", options)?;
    Ok((db, partition))
}

/// Executes one put.
pub(super) fn store(partition: &Partition, input: &InputFiles, put: u64) -> Result<Option<AckRecord>> {
    let Ok(content) = input.content(put) else { return Ok(None) };
    partition.insert(input.key(put), &content)?;
    Ok(Some(AckRecord { len: content.len() as u64, hash: fingerprint(&content) }))
}

/// The writer process: executes all puts and acknowledges each on standard output. Then it waits, with the database
/// open, until the parent kills it.
pub(crate) fn run_writer(args: &WriterArgs, db: &Path) -> Result<CommandOutcome> {
    let input = InputFiles::load(&args.list, &args.root, args.versions)?;
    let (db, partition) = open(db, args.memtable_bytes)?;
    let mut out = io::stdout().lock();
    for put in 0..input.puts() {
        let record = encode(store(&partition, &input, put)?);
        out.write_all(&record).and_then(|()| out.flush()).map_err(|_| CliError::pipe_closed())?;
    }
    // The parent writes nothing to this pipe: the read returns after the parent has ended.
    let _ = io::stdin().read(&mut [0]);
    drop(partition);
    db.close()?;
    Ok(CommandOutcome::Success)
}

/// A started writer process.
pub(super) struct WriterProcess(Child);

impl WriterProcess {
    pub(super) fn start(input: &InputFiles, list: &Path, db: &Path, memtable_bytes: u64) -> Result<WriterProcess> {
        input.save(list)?;
        let program = std::env::current_exe().map_err(|e| CliError::os("find this program", "azekura", e))?;
        let mut command = Command::new(&program);
        command.args(["demo-writer", "--db"]).arg(db).arg("--list").arg(list).arg("--root").arg(&input.root);
        command.args(["--versions", &input.versions.to_string(), "--memtable-bytes", &memtable_bytes.to_string()]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Ok(WriterProcess(child.map_err(|e| CliError::os("start the writer", program, e))?))
    }

    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Receives acknowledgements. Kills the process once `kill_at_bytes` are acknowledged and a memtable was flushed to
    /// `db`, at the latest at `until` or after the last put. Also returns whether SIGKILL ended the process.
    pub(super) fn receive_and_kill(
        mut self,
        input: &InputFiles,
        db: &Path,
        kill_at_bytes: u64,
        until: Instant,
    ) -> Result<(Vec<Option<AckRecord>>, bool)> {
        let mut acks = Vec::new();
        let mut bytes = 0;
        let mut pipe = BufReader::new(self.0.stdout.take().expect("it was started with a pipe"));
        // Records that are in the pipe at the kill are acknowledged, so the loop reads to the end of the pipe.
        while let Ok(ack) = receive(&mut pipe) {
            interrupt::check()?;
            acks.push(ack);
            bytes += ack.map_or(0, |ack| ack.len);
            let last = acks.len() as u64 == input.puts() || Instant::now() >= until;
            if last || (bytes >= kill_at_bytes && count_tables(db) > 0) {
                self.0.kill().map_err(|e| CliError::os("kill the writer", "process", e))?;
            }
        }
        drop(pipe);
        interrupt::check()?;
        let status = self.0.wait().map_err(|e| CliError::os("wait for the writer", "process", e))?;
        let killed = was_killed(status);
        if killed || status.success() {
            return Ok((acks, killed));
        }
        let mut error = String::new();
        let _ = self.0.stderr.take().map(|mut pipe| pipe.read_to_string(&mut error));
        let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(3);
        Err(CliError::writer(code, format!("the writer process failed ({status}): {}", error.trim_end())))
    }
}

impl Drop for WriterProcess {
    fn drop(&mut self) {
        // Both fail if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Number of tables in the directory of a database.
pub(super) fn count_tables(db: &Path) -> u64 {
    let names = db.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    names.filter(|path| path.extension().is_some_and(|extension| extension == "sst")).count() as u64
}

#[cfg(unix)]
fn was_killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    const SIGKILL: i32 = 9;
    status.signal() == Some(SIGKILL)
}

#[cfg(not(unix))]
fn was_killed(status: ExitStatus) -> bool {
    !status.success()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip_and_cut_record_fails() {
        let records = [Some(AckRecord { len: 5, hash: u64::MAX }), None];
        let pipe: Vec<u8> = records.iter().flat_map(|ack| encode(*ack)).collect();
        let mut input = pipe.as_slice();
        for record in records {
            assert_eq!(receive(&mut input).unwrap(), record);
        }
        assert!(receive(&mut input).is_err());
        for cut in 0..16 {
            assert!(receive(&mut &pipe[..cut]).is_err(), "cut at {cut}");
        }
    }
}
