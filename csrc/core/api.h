// Marks what leaves a library file: everything else is hidden (-fvisibility=hidden).
#pragma once

#define TINYSERVE_API __attribute__((visibility("default")))
