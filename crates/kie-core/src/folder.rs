//! What lies in a folder that is no model folder, and how to get from it to one: said where reading
//! it failed, so that an error names the way out and not only what is missing.

use std::path::Path;

use crate::error::Error;

/// A kind of folder: the file that gives it away, what to call it, and how to convert it.
struct Kind {
    file: &'static str,
    found: &'static str,
    /// `DIR` stands for the folder, `BASE` for the model that an adapter was made for.
    hint: &'static str,
}

/// Looked for in this order, where a file that kie reads is missing.
const KINDS: &[Kind] = &[
    Kind {
        file: "adapter_config.json",
        found: "a LoRA adapter without its model (adapter_config.json)",
        hint: "open BASE with adapter=\"DIR\" (`kie run -m BASE --adapter DIR`), or merge it into \
               BASE: `python -c \"import peft, sys; m = peft.\
               AutoPeftModelForCausalLM.from_pretrained('DIR').merge_and_unload(); \
               m.save_pretrained('DIR-merged')\"`, and copy the tokenizer's files there",
    },
    Kind {
        file: "pytorch_model.bin",
        found: "PyTorch's own format (pytorch_model.bin), which is a program and not only data",
        hint: SAFETENSORS,
    },
    Kind {
        file: "pytorch_model.bin.index.json",
        found: "PyTorch's own format (pytorch_model-*.bin), which is a program and not only data",
        hint: SAFETENSORS,
    },
    Kind {
        file: "consolidated.00.pth",
        found: "the format of the original release (consolidated.00.pth)",
        hint: "fetch the repository of the same model that holds config.json and *.safetensors \
               (its name often ends in -hf)",
    },
    Kind {
        file: "tokenizer.model",
        found: "only a SentencePiece model (tokenizer.model)",
        hint: "`python -c \"import transformers as t; t.AutoTokenizer.from_pretrained('DIR')\
               .save_pretrained('DIR')\"` writes tokenizer.json",
    },
];

const SAFETENSORS: &str = "`python -c \"import transformers as t; t.AutoModelForCausalLM.\
    from_pretrained('DIR').save_pretrained('DIR')\"` writes model.safetensors";

/// The same error with what was found in the folder, and the way out, where a file is missing.
pub(crate) fn explain(folder: &Path, error: Error) -> Error {
    let Error::Load { file, tensor: None, wanted, got, hint: None } = error else { return error };
    if !folder.is_dir() {
        let hint = match folder.exists() {
            true => "pass the folder that holds it, or a .gguf file".to_owned(),
            false => "pass a folder, a .gguf file, or a hub id: org/name".to_owned(),
        };
        return Error::Load { file, tensor: None, wanted, got, hint: Some(hint) };
    }
    // Of a file that is there reading says what is wrong with it.
    let missing = file == folder || !kie_kernels::file::is_listed(&file);
    let is_tokenizer = |kind: &Kind| kind.file == "tokenizer.model";
    let of_tokenizer = file.ends_with("tokenizer.json");
    let found = KINDS.iter().find(|kind| {
        is_tokenizer(kind) == of_tokenizer && kie_kernels::file::is_listed(&folder.join(kind.file))
    });
    let Some(kind) = found.filter(|_| missing) else {
        return Error::Load { file, tensor: None, wanted, got, hint: None };
    };
    let base = base_model(folder).unwrap_or_else(|| "its model".to_owned());
    let hint = kind.hint.replace("DIR", &folder.display().to_string()).replace("BASE", &base);
    Error::Load { file, tensor: None, wanted, got: kind.found.to_owned(), hint: Some(hint) }
}

/// The model that an adapter was made for.
fn base_model(folder: &Path) -> Option<String> {
    let config = crate::json::read(&folder.join("adapter_config.json")).ok()?;
    Some(config["base_model_name_or_path"].as_str()?.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::Engine;

    #[test]
    fn folders_that_are_no_models_are_told_apart_and_how_to_convert_them() {
        let demo = crate::engine::fake::demo();
        let cases: &[(&str, &[&str], &str, &str)] = &[
            ("adapter_config.json", &[], "LoRA adapter", "merge it into org/base"),
            ("pytorch_model.bin", &["config.json", "tokenizer.json"], "PyTorch", "safetensors"),
            ("tokenizer.model", &["config.json"], "SentencePiece", "writes tokenizer.json"),
            ("consolidated.00.pth", &[], "original release", "-hf"),
        ];
        for (file, beside, found, hint) in cases {
            let at = format!("kie-folder-{}-{file}", std::process::id());
            let folder = std::env::temp_dir().join(at);
            std::fs::create_dir_all(&folder).unwrap();
            for name in *beside {
                std::fs::copy(demo.join(name), folder.join(name)).unwrap();
            }
            std::fs::write(folder.join(file), r#"{"base_model_name_or_path": "org/base"}"#)
                .unwrap();
            let error = Engine::builder(&folder).device("cpu").build().err().unwrap();
            std::fs::remove_dir_all(&folder).unwrap();
            assert_eq!(error.class(), "LoadError", "{error}");
            assert!(error.to_string().contains(found), "{error}");
            assert!(error.hint().contains(hint), "{}", error.hint());
            assert!(!error.hint().contains("DIR"), "{}", error.hint());
        }
        let nowhere = Engine::builder("no/such/folder").device("cpu").build().err().unwrap();
        assert!(nowhere.hint().contains("org/name"), "{nowhere} {}", nowhere.hint());
    }
}
