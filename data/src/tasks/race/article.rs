//! The articles of RACE as its files have them: a text with questions of four options each.
//!
//! A file holds one JSON object or several, one behind another, each with `article`, `questions`, `options` and
//! `answers`. A question with `_` is a gap that each option fills; another one stands in front of its options.
//!
//! Source: Lai et al., arXiv 1704.04683, and `tasks/race` of Megatron-LM.

use ferrotron_tensor::{Error, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Options of a question.
pub const NUM_CHOICES: usize = 4;

/// The names of the options in `answers`.
const LETTERS: [&str; NUM_CHOICES] = ["A", "B", "C", "D"];

/// Ends of the names of files in a folder that are read.
const EXTENSIONS: [&str; 3] = ["txt", "json", "jsonl"];

/// An article with its questions. White space in texts is single spaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaceArticle {
    /// The text.
    pub text: String,
    /// The questions on it.
    pub questions: Vec<RaceQuestion>,
}

/// A question joined with each of its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaceQuestion {
    /// The question with an option in its gap or behind it.
    pub choices: [String; NUM_CHOICES],
    /// The number of the right one, from 0.
    pub answer: usize,
}

/// An object of a file.
#[derive(Deserialize)]
struct Record {
    article: String,
    questions: Vec<String>,
    options: Vec<Vec<String>>,
    answers: Vec<String>,
}

impl RaceArticle {
    /// Reads files, and of folders all files below them that end in .txt, .json or .jsonl, in the order of their names.
    ///
    /// # Errors
    /// A path that is not there; a folder without such files; what is no article, with the file and the line; no
    /// question in all of them.
    pub fn read(paths: &[PathBuf]) -> Result<Vec<RaceArticle>> {
        let mut files = Vec::new();
        for path in paths {
            let before = files.len();
            find(path, &mut files)?;
            files[before..].sort();
            if files.len() == before {
                let message = format!("'{}' has no .txt, .json or .jsonl file", path.display());
                return Err(Error::io("race", message));
            }
        }
        let mut articles = Vec::new();
        for file in &files {
            let bytes = std::fs::read(file).map_err(|error| unreadable(file, &error))?;
            let refuse = |why: String| Error::io("race", format!("'{}': {why}", file.display()));
            articles.extend(RaceArticle::parse(&bytes).map_err(refuse)?);
        }
        if articles.iter().all(|article| article.questions.is_empty()) {
            let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            let message = format!("there is no question in '{}'", names.join("', '"));
            return Err(Error::io("race", message));
        }
        Ok(articles)
    }

    /// The articles of a file's JSON objects.
    fn parse(bytes: &[u8]) -> std::result::Result<Vec<RaceArticle>, String> {
        let records = serde_json::Deserializer::from_slice(bytes).into_iter::<Record>();
        let article = |(record, number): (serde_json::Result<Record>, u64)| {
            let record = record.map_err(|error| format!("not an article of RACE: {error}"))?;
            record.into_article().map_err(|why| format!("article {number}: {why}"))
        };
        records.zip(1..).map(article).collect()
    }
}

impl Record {
    fn into_article(self) -> std::result::Result<RaceArticle, String> {
        let counts = [self.questions.len(), self.options.len(), self.answers.len()];
        if counts.iter().any(|count| *count != counts[0]) {
            let [questions, options, answers] = counts;
            return Err(format!(
                "{questions} questions, {options} lists of options and {answers} answers"
            ));
        }
        let rows = self.questions.iter().zip(&self.options).zip(&self.answers).zip(1..);
        let questions = rows.map(|(((question, options), answer), number)| {
            let refuse = |why: String| format!("question {number} {why}");
            let options: &[String; NUM_CHOICES] = options
                .as_slice()
                .try_into()
                .map_err(|_| refuse(format!("has {} options, not {NUM_CHOICES}", options.len())))?;
            let answer = LETTERS.iter().position(|letter| letter == answer).ok_or_else(|| {
                refuse(format!("has the answer '{answer}', none of {}", LETTERS.join(", ")))
            })?;
            let choices = options.each_ref().map(|option| match question.contains('_') {
                true => clean(&question.replace('_', option)),
                false => clean(&format!("{question} {option}")),
            });
            Ok(RaceQuestion { choices, answer })
        });
        let questions = questions.collect::<std::result::Result<_, String>>()?;
        Ok(RaceArticle { text: clean(&self.article), questions })
    }
}

/// Makes each run of white space one space, and takes away that in front of a full stop between two.
fn clean(text: &str) -> String {
    // Python's \s has the four separators, too.
    let is_space = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
    let mut cleaned = String::with_capacity(text.len());
    for c in text.chars() {
        match is_space(c) {
            true if cleaned.ends_with(' ') => {}
            true => cleaned.push(' '),
            false => cleaned.push(c),
        }
    }
    // Full stops that share a space are found in turns.
    (0..3).fold(cleaned, |text, _| text.replace(" . ", ". "))
}

/// Adds a file, or those below a folder.
fn find(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        if !path.exists() {
            return Err(Error::io("race", format!("there is no '{}'", path.display())));
        }
        files.push(path.to_path_buf());
        return Ok(());
    }
    for entry in std::fs::read_dir(path).map_err(|error| unreadable(path, &error))? {
        let found = entry.map_err(|error| unreadable(path, &error))?.path();
        let extension = found.extension().and_then(|extension| extension.to_str());
        if found.is_dir() || extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
            find(&found, files)?;
        }
    }
    Ok(())
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::io("race", format!("cannot read '{}': {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_filled_and_another_question_stands_in_front() {
        let text = r#"{"article": "One \n two .  . Three", "questions": ["A _ b _", "Why?\t"],
            "options": [["x", "y", "z", "w"], ["p", "q ", "r", "s"]], "answers": ["B", "D"], "id": "1"}
            {"article": "", "questions": [], "options": [], "answers": []}"#;
        let articles = RaceArticle::parse(text.as_bytes()).unwrap();
        assert_eq!(articles.len(), 2);
        let RaceArticle { text, questions } = &articles[0];
        assert_eq!(text, "One two.. Three");
        assert_eq!(questions[0].choices, ["A x b x", "A y b y", "A z b z", "A w b w"]);
        assert_eq!(questions[1].choices, ["Why? p", "Why? q ", "Why? r", "Why? s"]);
        assert_eq!((questions[0].answer, questions[1].answer), (1, 3));
    }

    #[test]
    fn what_is_no_article_is_named_with_its_place() {
        let good = r#"{"article": "", "questions": [], "options": [], "answers": []}"#;
        for (second, part) in [
            ("{\"article\": 3}", "not an article of RACE: invalid type"),
            ("{\"article\": \"\"", "not an article of RACE: EOF"),
            (r#"{"questions": []}"#, "not an article of RACE: missing field"),
            (
                r#"{"article": "", "questions": ["a"], "options": [], "answers": ["A"]}"#,
                "article 2: 1 questions, 0 lists of options and 1 answers",
            ),
            (
                r#"{"article": "", "questions": ["a"], "options": [["b"]], "answers": ["A"]}"#,
                "article 2: question 1 has 1 options, not 4",
            ),
            (
                r#"{"article": "", "questions": ["a"], "options": [["b","c","d","e"]], "answers": ["E"]}"#,
                "article 2: question 1 has the answer 'E', none of A, B, C, D",
            ),
        ] {
            let error = RaceArticle::parse(format!("{good}\n{second}").as_bytes()).unwrap_err();
            assert!(error.starts_with(part), "{error}");
            assert!(!part.starts_with("not") || error.contains(" at line 2 column "), "{error}");
        }
    }

    #[test]
    fn folders_are_read_whole_and_what_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, article: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let question =
                r#""questions": ["q"], "options": [["a","b","c","d"]], "answers": ["A"]"#;
            std::fs::write(path, format!("{{\"article\": \"{article}\", {question}}}")).unwrap();
        };
        write("middle/2.txt", "second");
        write("high/1.txt", "first");
        write("middle/notes.md", "no article");
        let paths = [folder.path().to_path_buf()];
        let articles = RaceArticle::read(&paths).unwrap();
        let texts: Vec<&str> = articles.iter().map(|article| article.text.as_str()).collect();
        assert_eq!(texts, ["first", "second"]);
        let refused =
            |name: &str| RaceArticle::read(&[folder.path().join(name)]).unwrap_err().to_string();
        std::fs::create_dir(folder.path().join("none")).unwrap();
        std::fs::write(folder.path().join("empty.txt"), "\n").unwrap();
        assert!(refused("absent").contains("there is no '"));
        assert!(refused("none").contains("has no .txt, .json or .jsonl file"));
        assert!(refused("empty.txt").contains("there is no question in '"));
    }
}
