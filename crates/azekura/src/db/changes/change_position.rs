//! Positions of the change feed.

use std::fmt;
use std::str::FromStr;

use crate::base::checksum::xxh3;
use crate::base::coding::ByteReader;
use crate::base::version_edit::WalEpoch;
use crate::base::{Error, Result, SeqNo};

/// A position between two commits of a database.
///
/// A position is durable: it can be stored as [bytes](ChangePosition::to_bytes) or as text, and used after the database
/// was closed, opened or recovered. Positions of one database are ordered as its commits are.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// use azekura::ChangePosition;
/// let before = db.change_position()?;
/// fruit.insert("apple", "red")?;
/// assert!(before < db.change_position()?);
/// let stored = before.to_string(); // 64 characters
/// assert_eq!(stored.parse::<ChangePosition>()?, before);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChangePosition {
    /// The instance id of the database: a checkpoint has another one.
    pub(crate) instance: [u8; 16],
    /// [`ManifestState::position_epoch`](crate::base::manifest_state::ManifestState::position_epoch) of the open that
    /// made the position.
    pub(crate) epoch: WalEpoch,
    /// The last sequence number before the position.
    pub(crate) seqno: SeqNo,
}

/// Length of an encoded position in bytes.
const POSITION_LEN: usize = 32;

impl ChangePosition {
    /// Encodes the position. Every version of this crate reads it.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::ChangePosition;
    /// let position = db.change_position()?;
    /// assert_eq!(ChangePosition::from_bytes(&position.to_bytes())?, position);
    /// # Ok(()) }
    /// ```
    pub fn to_bytes(&self) -> [u8; POSITION_LEN] {
        let mut out = [0; POSITION_LEN];
        out[..16].copy_from_slice(&self.instance);
        out[16..20].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[20..28].copy_from_slice(&self.seqno.0.to_le_bytes());
        let sum = xxh3(0, &out[..28]);
        out[28..].copy_from_slice(&sum.to_le_bytes()[..4]);
        out
    }

    /// Decodes a position.
    ///
    /// # Errors
    /// `Invalid` if `bytes` are not those of a position.
    ///
    /// ```
    /// let error = azekura::ChangePosition::from_bytes(&[7; 32]).unwrap_err();
    /// assert_eq!(error.kind(), azekura::ErrorKind::Invalid);
    /// ```
    pub fn from_bytes(bytes: &[u8]) -> Result<ChangePosition> {
        let malformed = || Error::invalid("the bytes are not those of a position of changes");
        let bytes: &[u8; POSITION_LEN] = bytes.try_into().map_err(|_| malformed())?;
        let mut d = ByteReader::new(bytes);
        let position = ChangePosition { instance: d.bytes16()?, epoch: WalEpoch(d.u32()?), seqno: SeqNo(d.u64()?) };
        if position.to_bytes() != *bytes || position.seqno > SeqNo::MAX {
            return Err(malformed());
        }
        Ok(position)
    }

    /// The random id of the database that the position is of. A checkpoint has another one.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let other = azekura::Config::new(dir.path().join("other")).open()?;
    /// assert_ne!(db.change_position()?.database_id(), other.change_position()?.database_id());
    /// # Ok(()) }
    /// ```
    pub fn database_id(&self) -> [u8; 16] {
        self.instance
    }

    /// The epoch of the position. It rises with every open of the database for writing. A recovery that loses commits
    /// gives later commits their sequence numbers, in a later epoch.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// # let db = azekura::Config::new(&path).open()?;
    /// let before = db.change_position()?.epoch();
    /// db.close()?;
    /// let db = azekura::Config::new(&path).open()?;
    /// assert!(db.change_position()?.epoch() > before);
    /// # Ok(()) }
    /// ```
    pub fn epoch(&self) -> u32 {
        self.epoch.0
    }

    /// The number of the last record before the position. It rises with every record that the WAL gets.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let before = db.change_position()?;
    /// fruit.insert("apple", "red")?;
    /// fruit.insert("pear", "green")?;
    /// assert_eq!(db.change_position()?.sequence_number() - before.sequence_number(), 2);
    /// # Ok(()) }
    /// ```
    pub fn sequence_number(&self) -> u64 {
        self.seqno.0
    }
}

/// None for positions of different databases.
impl PartialOrd for ChangePosition {
    fn partial_cmp(&self, other: &ChangePosition) -> Option<std::cmp::Ordering> {
        let order = (self.seqno, self.epoch).cmp(&(other.seqno, other.epoch));
        (self.instance == other.instance).then_some(order)
    }
}

impl fmt::Display for ChangePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for ChangePosition {
    type Err = Error;

    fn from_str(text: &str) -> Result<ChangePosition> {
        let malformed = || Error::invalid("the text is not that of a position of changes");
        if text.len() != 2 * POSITION_LEN || !text.is_ascii() {
            return Err(malformed());
        }
        let digits = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| malformed());
        let bytes: Vec<u8> = (0..text.len()).step_by(2).map(digits).collect::<Result<_>>()?;
        ChangePosition::from_bytes(&bytes)
    }
}
