//! HTML pages out of nothing: seeded, of log-normal sizes, about as compressible as the pages of a documentation.

use crate::workload::rng::Rng;
use crate::workload::zipf::{THETA, Zipf};
use std::fmt::Write as _;

/// Half of all pages are smaller.
const MEDIAN_BYTES: f64 = 4300.0;
/// The standard deviation of the logarithm of a size.
const SPREAD: f64 = 1.3;
const LEAST_BYTES: f64 = 300.0;
const MOST_BYTES: f64 = (4 << 20) as f64;
const WORDS: u64 = 6000;
const SYLLABLES: [&str; 24] = [
    "ar", "be", "con", "de", "en", "fi", "ga", "hi", "in", "ju", "ka", "le", "men", "no", "or", "per", "qui", "re",
    "st", "ti", "un", "ver", "wa", "zo",
];

/// Makes pages, one after the other. The same seed gives the same ones.
pub(super) struct Generator {
    rng: Rng,
    words: Vec<String>,
    choice: Zipf,
}

impl Generator {
    pub(super) fn new(seed: u64) -> Generator {
        let mut rng = Rng::new(seed);
        let word = |rng: &mut Rng| {
            let syllables = 1 + rng.below(4);
            (0..syllables).map(|_| SYLLABLES[rng.below(SYLLABLES.len() as u64) as usize]).collect()
        };
        let words = (0..WORDS).map(|_| word(&mut rng)).collect();
        Generator { rng, words, choice: Zipf::new(WORDS, THETA) }
    }

    /// A size with a logarithm that is normally distributed.
    fn size(&mut self) -> usize {
        let normal = (0..12).map(|_| self.rng.unit()).sum::<f64>() - 6.0;
        (MEDIAN_BYTES.ln() + SPREAD * normal).exp().clamp(LEAST_BYTES, MOST_BYTES) as usize
    }

    fn word(&mut self) -> usize {
        self.choice.rank(&mut self.rng) as usize
    }

    /// The next page.
    pub(super) fn page(&mut self) -> String {
        let size = self.size();
        let title = self.word();
        let title = &self.words[title];
        let mut page = format!(
            "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
             <link rel=\"stylesheet\" href=\"../static.files/page.css\"></head><body class=\"page\">\n\
             <h1>{title}</h1>\n"
        );
        while page.len() < size {
            match self.rng.below(4) {
                0 => self.list(&mut page),
                1 => self.code(&mut page),
                _ => self.paragraph(&mut page),
            }
        }
        page.push_str("</body></html>\n");
        page
    }

    fn paragraph(&mut self, page: &mut String) {
        page.push_str("<div class=\"docblock\"><p>");
        for i in 0..12 + self.rng.below(50) {
            let word = self.word();
            let gap = if i == 0 { "" } else { " " };
            let _ = write!(page, "{gap}{}", self.words[word]); // writing to a string cannot fail
        }
        page.push_str(".</p></div>\n");
    }

    fn list(&mut self, page: &mut String) {
        page.push_str("<ul class=\"item-table\">");
        for _ in 0..3 + self.rng.below(8) {
            let (one, other) = (self.word(), self.word());
            let (one, other) = (&self.words[one], &self.words[other]);
            let _ = write!(
                page,
                "<li><a class=\"struct\" href=\"../{one}/struct.{other}.html\" title=\"struct {one}::{other}\">{other}\
                 </a></li>"
            );
        }
        page.push_str("</ul>\n");
    }

    fn code(&mut self, page: &mut String) {
        page.push_str("<pre class=\"rust item-decl\"><code>");
        for _ in 0..2 + self.rng.below(6) {
            let (name, kind) = (self.word(), self.word());
            let number = self.rng.below(100_000);
            let _ = writeln!(page, "    pub {}: {}&lt;u64, {number}&gt;,", self.words[name], self.words[kind]);
        }
        page.push_str("</code></pre>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::{Generator, MEDIAN_BYTES};
    use std::collections::BTreeSet;

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
