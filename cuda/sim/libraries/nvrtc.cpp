// A stand-in for NVRTC: a kernel's text is compiled for the CPU, with the headers of `shim`. The "cubin" is the path of the
// library that came out.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>

namespace {
enum Status { SUCCESS = 0, COMPILATION = 6 };
struct Program { std::string source, name, log, cubin; };

std::string read(const std::string& path) {
    std::string text;
    if (FILE* file = fopen(path.c_str(), "r")) {
        char part[4096];
        for (size_t n; (n = fread(part, 1, sizeof part, file));) text.append(part, n);
        fclose(file);
    }
    return text;
}

// The text behind the headers of the shim, and a table of its kernels.
std::string for_cpu(const std::string& source) {
    const size_t cut = source.find("\nnamespace of_");
    std::string text = "#include \"cusim.h\"\n" + source.substr(0, cut) + "\n#include \"types.h\"\n#include \"mma.h\"\n" + source.substr(cut);
    const std::string entry = "extern \"C\" __global__ void __launch_bounds__(";
    std::string table;
    int count = 0;
    for (size_t at = 0; (at = source.find("\n" + entry, at)) != std::string::npos; at++) {
        const size_t begin = source.find(") ", at) + 2, end = source.find_first_of("(\n", begin);
        const std::string name = source.substr(begin, end - begin);
        const std::string kernel = "of_" + name.substr(name.rfind('_') + 1) + "::" + name;
        table += "    {\"" + name + "\", cusim::Caller<" + kernel + ">::call, cusim::Caller<" + kernel + ">::sizes},\n";
        count++;
    }
    return text + "const cusim::Kernel cusim::kernels[] = {\n" + table + "};\nconst int cusim::n_kernels = " + std::to_string(count) + ";\n";
}
}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

// No real one has this version: it is part of an entry's name in the cache of compiled kernels, where these must not be found.
API nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 999; return SUCCESS; }
API nvrtcCreateProgram(void** program, const char* source, const char* name, int, const char* const*, const char* const*) {
    *program = new Program{source, name, "", ""};
    return SUCCESS;
}
API nvrtcCompileProgram(void* handle, int, const char* const*) {
    static std::atomic<int> counter{0};
    Program& program = *(Program*)handle;
    const std::string text = for_cpu(program.source);
    const std::string stem = std::string(FOLDER) + "/" + program.name + "-" + std::to_string(std::hash<std::string>()(text));
    program.cubin = stem + ".so";
    if (access(program.cubin.c_str(), R_OK) == 0) return SUCCESS;
    const std::string unique = stem + "-" + std::to_string(getpid()) + "-" + std::to_string(counter++);
    FILE* file = fopen((unique + ".cpp").c_str(), "w");
    if (!file) return COMPILATION;
    fwrite(text.data(), 1, text.size(), file);
    fclose(file);
    const std::string command = "g++ " FLAGS " -I '" SHIM "' -o '" + unique + ".so' '" + unique + ".cpp' 2> '" + unique + ".log'";
    const bool failed = system(command.c_str()) != 0;
    program.log = read(unique + ".log");
    unlink((unique + ".log").c_str());
    if (failed) return COMPILATION;
    unlink((unique + ".cpp").c_str());
    return rename((unique + ".so").c_str(), program.cubin.c_str()) == 0 ? SUCCESS : COMPILATION;
}
API nvrtcGetProgramLogSize(void* program, size_t* size) { *size = ((Program*)program)->log.size() + 1; return SUCCESS; }
API nvrtcGetProgramLog(void* program, char* log) { strcpy(log, ((Program*)program)->log.c_str()); return SUCCESS; }
API nvrtcGetCUBINSize(void* program, size_t* size) { *size = ((Program*)program)->cubin.size() + 1; return SUCCESS; }
API nvrtcGetCUBIN(void* program, char* cubin) { strcpy(cubin, ((Program*)program)->cubin.c_str()); return SUCCESS; }
API nvrtcDestroyProgram(void** program) { delete (Program*)*program; return SUCCESS; }
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int status) {
    return status == COMPILATION ? "compilation failed" : "no error";
}
