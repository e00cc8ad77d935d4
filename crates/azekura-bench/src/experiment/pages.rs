//! HTML pages: every file below a directory, or generated ones with log-normal sizes, in a random order.
//!
//! The parent packs them into one file, so that its children need not search for tens of thousands of files each.

use crate::engine::object;
use crate::error::{Result, wrong};
use crate::measure::disk::files;
use crate::workload::data::{self, Zipfian, below, shuffle};
use anyhow::ensure;
use rand::rngs::SmallRng;
use rand_distr::{Distribution, LogNormal};
use serde_json::{Map, Value, json};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Not every engine takes longer keys.
const KEY_BYTES_MAX: usize = 400;
/// No page has more than one part in this many of the bytes of all pages.
const PART_MAX: u64 = 32;
const SEED: u64 = 41;

/// A key and a page.
type Page = (Vec<u8>, Vec<u8>);

/// Writes pages of at least `least_bytes`, `total_bytes` together, into the file `to`: pages below `asked`; without it
/// from the documentation of the Rust toolchain, or generated ones if there is none. Returns `pages_from`, `pages`,
/// `page_bytes` and `mean_page_bytes`.
pub(crate) fn pack(asked: Option<&Path>, least_bytes: u64, total_bytes: u64, to: &Path) -> Result<Map<String, Value>> {
    let (mut from, mut pages) = ("files", Vec::new());
    if let Some(dir) = asked.map(Path::to_path_buf).or_else(documentation) {
        let files = html_files(&dir, least_bytes.max(1), total_bytes / PART_MAX)?.into_iter();
        pages = take(
            files.map(|path| Ok((path.strip_prefix(&dir)?.as_os_str().as_bytes().to_vec(), std::fs::read(&path)?))),
            total_bytes,
        )?;
        ensure!(!pages.is_empty() || asked.is_none(), "there are no HTML pages below {}", dir.display());
    }
    if pages.is_empty() {
        (from, pages) = ("generated", generated(least_bytes, total_bytes)?);
    }
    std::fs::write(to, postcard::to_stdvec(&pages)?)?;
    let bytes: u64 = pages.iter().map(|(_, page)| page.len() as u64).sum();
    let mean = bytes as f64 / pages.len() as f64;
    Ok(object(json!({"pages_from": from, "pages": pages.len(), "page_bytes": bytes, "mean_page_bytes": mean})))
}

/// The first pages that have `total_bytes` together.
fn take(pages: impl Iterator<Item = Result<Page>>, total_bytes: u64) -> Result<Vec<Page>> {
    let mut remaining_bytes = total_bytes;
    let is_wanted = |page: &Result<Page>| {
        let wanted = remaining_bytes > 0;
        remaining_bytes = remaining_bytes.saturating_sub(page.as_ref().map_or(0, |(_, page)| page.len() as u64));
        wanted
    };
    pages.take_while(is_wanted).collect()
}

fn generated(least_bytes: u64, total_bytes: u64) -> Result<Vec<Page>> {
    let mut generator = Generator::new(SEED);
    let key = |number: u64| format!("site/{:02x}/page{number}.html", number % 251).into_bytes();
    let pages = (1..).map(|number| (key(number), generator.page().into_bytes()));
    take(pages.filter(|(_, page)| page.len() as u64 >= least_bytes).map(Ok), total_bytes)
}

/// The directory in which the toolchain has its documentation, if it has any.
fn documentation() -> Option<PathBuf> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output().ok()?;
    let dir = Path::new(String::from_utf8(output.stdout).ok()?.trim()).join("share/doc");
    (output.status.success() && dir.is_dir()).then_some(dir)
}

/// The HTML files below `dir` of `min_bytes` to `max_bytes` bytes, in a random order.
fn html_files(dir: &Path, min_bytes: u64, max_bytes: u64) -> Result<Vec<PathBuf>> {
    std::fs::read_dir(dir)?; // a missing directory is an error
    let longest = dir.as_os_str().len() + 1 + KEY_BYTES_MAX;
    let is_html = |path: &Path| path.extension().is_some_and(|end| end == "html" || end == "htm");
    let found =
        files(dir).filter(|(path, metadata)| is_html(path) && (min_bytes..=max_bytes).contains(&metadata.len()));
    let mut found: Vec<PathBuf> = found.map(|(path, _)| path).collect();
    shuffle(&mut found, SEED);
    found.retain(|path| path.as_os_str().len() <= longest);
    Ok(found)
}

/// Packed pages, in memory. Immutable.
pub(crate) struct Pages(Vec<Page>);

impl Pages {
    /// The pages that were packed into a file.
    pub(crate) fn read(path: &Path) -> Result<Pages> {
        Ok(Pages(postcard::from_bytes(&std::fs::read(path)?)?))
    }

    /// The number of pages. Larger indices are copies, with another key and a comment before the page.
    pub(crate) fn count(&self) -> u64 {
        self.0.len() as u64
    }

    fn find(&self, index: u64) -> (&Page, u64) {
        (&self.0[(index % self.count()) as usize], index / self.count())
    }

    /// Writes the key of the page at `index` over `out`.
    pub(crate) fn key(&self, index: u64, out: &mut Vec<u8>) {
        let ((key, _), copy) = self.find(index);
        out.clone_from(key);
        if copy > 0 {
            out.extend_from_slice(format!("?copy={copy}").as_bytes());
        }
    }

    /// Writes the page at `index` in that version over `out`: unchanged in version 0 of its first copy, otherwise after
    /// a comment.
    pub(crate) fn page(&self, index: u64, version: u64, out: &mut Vec<u8>) {
        let ((_, page), copy) = self.find(index);
        out.clear();
        out.extend_from_slice(comment(version, copy).as_bytes());
        out.extend_from_slice(page);
    }

    /// Compares `found` with that page, to the last byte; an error if they differ.
    pub(crate) fn check(&self, index: u64, version: u64, found: &[u8]) -> Result<()> {
        let ((_, page), copy) = self.find(index);
        let right = found.strip_prefix(comment(version, copy).as_bytes()) == Some(page);
        ensure!(right, wrong(format!("page {index} in version {version} was returned with other content")));
        Ok(())
    }
}

fn comment(version: u64, copy: u64) -> String {
    if (version, copy) == (0, 0) { String::new() } else { format!("<!-- version {version} of copy {copy} -->\n") }
}

/// Half of all pages are smaller.
const MEDIAN_BYTES: f64 = 4300.0;
/// The standard deviation of the logarithm of a size.
const LOG_BYTES_DEVIATION: f64 = 1.3;
const BOUNDS: (f64, f64) = (300.0, (4 << 20) as f64);
const WORDS: u64 = 6000;
const SYLLABLES: [&str; 24] = [
    "ar", "be", "con", "de", "en", "fi", "ga", "hi", "in", "ju", "ka", "le", "men", "no", "or", "per", "qui", "re",
    "st", "ti", "un", "ver", "wa", "zo",
];

/// Makes pages, one after the other. The same seed gives the same ones.
pub(crate) struct Generator {
    rng: SmallRng,
    words: Vec<String>,
    choice: Zipfian,
}

impl Generator {
    pub(crate) fn new(seed: u64) -> Generator {
        let mut rng = data::rng(seed);
        let syllable = |rng: &mut SmallRng| SYLLABLES[below(rng, SYLLABLES.len() as u64) as usize];
        let word = |_| (0..=below(&mut rng, 4)).map(|_| syllable(&mut rng)).collect();
        let words = (0..WORDS).map(word).collect();
        Generator { rng, words, choice: Zipfian::new(WORDS) }
    }

    /// The next page: zipfian words, links and declarations until it has a size whose logarithm is normally
    /// distributed.
    pub(crate) fn page(&mut self) -> String {
        let sizes = LogNormal::new(MEDIAN_BYTES.ln(), LOG_BYTES_DEVIATION).expect("the deviation is finite");
        let size = sizes.sample(&mut self.rng).clamp(BOUNDS.0, BOUNDS.1) as usize;
        let mut page = String::from("<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"></head><body>\n");
        while page.len() < size {
            let kind = below(&mut self.rng, 4);
            page.push_str(["<ul class=\"item-table\">", "<pre class=\"rust item-decl\">", "<p>", "<p>"][kind as usize]);
            for _ in 0..10 + below(&mut self.rng, 30) {
                let [one, other] = [(); 2].map(|()| &self.words[self.choice.rank(&mut self.rng) as usize]);
                page.push_str(&match kind {
                    0 => format!("<li><a class=\"struct\" href=\"../{one}/struct.{other}.html\">{other}</a></li>"),
                    1 => format!("    pub {one}: {other}&lt;u64, {}&gt;,\n", below(&mut self.rng, 100_000)),
                    _ => format!("{one} {other} "),
                });
            }
            page.push_str(["</ul>\n", "</pre>\n", ".</p>\n", ".</p>\n"][kind as usize]);
        }
        page.push_str("</body></html>\n");
        page
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Generator, MEDIAN_BYTES, Pages, generated, pack};
    use crate::error::{ErrorKind, KnownError};
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// A few hundred generated pages of at least 1 KiB, in the file that is given.
    pub(crate) fn small_pack(dir: &Path) -> PathBuf {
        let to = dir.join("pages");
        fs::write(&to, postcard::to_stdvec(&generated(1024, 400_000).unwrap()).unwrap()).unwrap();
        to
    }

    #[test]
    fn every_html_file_of_a_directory_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("in/below")).unwrap();
        for (name, text) in [("a.html", "one"), ("below/b.htm", "two"), ("below/c.css", "no"), ("empty.html", "")] {
            fs::write(dir.path().join("in").join(name), text).unwrap();
        }
        let to = dir.path().join("pages");
        let packed = pack(Some(&dir.path().join("in")), 0, 1 << 20, &to).unwrap();
        let summary = ["pages_from", "pages", "page_bytes", "mean_page_bytes"].map(|field| packed[field].to_string());
        assert_eq!(summary, ["\"files\"", "2", "6", "3.0"]);
        let pages = Pages::read(&to).unwrap();
        let mut all = Vec::new();
        for index in 0..4 {
            let (mut key, mut page) = (Vec::new(), Vec::new());
            pages.key(index, &mut key);
            pages.page(index, 0, &mut page);
            pages.check(index, 0, &page).unwrap();
            all.push((String::from_utf8(key).unwrap(), String::from_utf8(page).unwrap()));
        }
        all.sort();
        let comment = "<!-- version 0 of copy 1 -->\n";
        let expected =
            [("a.html", "one"), ("a.html?copy=1", "one"), ("below/b.htm", "two"), ("below/b.htm?copy=1", "two")];
        for ((key, page), (name, text)) in all.iter().zip(expected) {
            let front = if name.contains('?') { comment } else { "" };
            assert_eq!((key.as_str(), page.as_str()), (name, format!("{front}{text}").as_str()));
        }
        assert!(pack(Some(&dir.path().join("in/none")), 0, 1 << 20, &to).is_err());
        fs::create_dir(dir.path().join("void")).unwrap();
        let error = pack(Some(&dir.path().join("void")), 0, 1 << 20, &to).unwrap_err().to_string();
        assert!(error.contains("no HTML pages"), "{error}");
    }

    #[test]
    fn generated_pages_verify_by_index_and_version() {
        let dir = tempfile::tempdir().unwrap();
        let pages = Pages::read(&small_pack(dir.path())).unwrap();
        assert!((10..=100).contains(&pages.count()), "{}", pages.count());
        let (mut page, mut other) = (Vec::new(), Vec::new());
        for index in 0..pages.count() {
            pages.page(index, 0, &mut page);
            assert!(page.len() >= 1024);
        }
        pages.page(7, 1, &mut page);
        pages.page(7, 2, &mut other);
        assert!(page != other && page.len() == other.len());
        pages.check(7, 2, &other).unwrap();
        *other.last_mut().unwrap() ^= 1;
        for (index, version, found) in [(7, 2, &page), (8, 1, &page), (7, 2, &other)] {
            let error = pages.check(index, version, found).unwrap_err();
            assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong);
        }
    }

    #[test]
    fn a_broken_pack_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let to = small_pack(dir.path());
        let whole = fs::read(&to).unwrap();
        for len in [0, 3, 7, whole.len() - 1] {
            fs::write(&to, &whole[..len]).unwrap();
            assert!(Pages::read(&to).is_err(), "{len}");
        }
    }

    #[test]
    fn pages_follow_from_the_seed_and_differ() {
        let pages = |seed| {
            let mut generator = Generator::new(seed);
            (0..300).map(|_| generator.page()).collect::<Vec<_>>()
        };
        let all = pages(1);
        assert_eq!(all, pages(1));
        assert_ne!(all[0], pages(2)[0]);
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 300);
        assert!(all.iter().all(|page| page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n")));
    }

    #[test]
    fn sizes_are_log_normal() {
        let mut generator = Generator::new(3);
        let mut sizes: Vec<f64> = (0..1001).map(|_| generator.page().len() as f64).collect();
        sizes.sort_by(f64::total_cmp);
        assert!((0.8..1.3).contains(&(sizes[500] / MEDIAN_BYTES)), "{}", sizes[500]);
        let (low, high) = ((sizes[500] / sizes[159]).ln(), (sizes[841] / sizes[500]).ln());
        assert!((0.9..1.6).contains(&low) && (1.0..1.6).contains(&high), "one deviation: {low} below, {high} above");
    }
}
